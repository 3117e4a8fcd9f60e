"""Logs each line of its input to a syslog server."""

import logging
import logging.handlers
import sys

logger = logging.getLogger()
logger.addHandler(logging.handlers.SysLogHandler(address=(sys.argv[1], int(sys.argv[2]))))
for line in sys.stdin:
    logger.warning(line.rstrip())
