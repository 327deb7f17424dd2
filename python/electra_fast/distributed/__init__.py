"""One step on several processes: ranks, their launch and watchdog, the division of rows and sums."""
