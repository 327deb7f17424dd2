"""What several processes need to share a step: ranks, their launch and watchdog, the division of rows and sums."""
