"""What holds for all tests."""

import signal

# A background job of a shell, or one under nohup, inherits that these are ignored, and hands it on to the processes
# whose answer to Ctrl-C and to a closed terminal the tests look at.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
