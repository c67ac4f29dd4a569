#!/usr/bin/env bash
# Prints who belongs to the cluster once all of it serves, and stays, since the runner ends everything when one process ends.
set -euo pipefail
"$BIN/magnetar" cluster status --wait 60 --bookies 3
echo "produce and consume:  $BIN/magnetar produce orders -m hello  |  $BIN/magnetar consume orders -s billing --start earliest -n 1"
echo "stop:                 Ctrl-C; the data stay in $DATA"
exec sleep infinity
