"""A command that is killed again and again until it reaches its end."""

import os
import signal
import subprocess


def kill_until_done(arguments, delay=2.0):
    """Starts a command, which resumes, and ends it with kill -9 at growing delays in seconds, at least once."""
    kills = 0
    while True:
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, start_new_session=True, text=True)
        try:
            _, errors = process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            delay, kills = delay * 1.5, kills + 1
            continue
        assert process.returncode == 0, errors
        break
    assert kills >= 1
