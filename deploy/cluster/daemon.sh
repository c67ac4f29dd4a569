#!/usr/bin/env bash
# A daemon of the cluster on this machine: waits for ZooKeeper, makes the cluster if there is none, and becomes the daemon.
set -euo pipefail
"$BIN/magnetar" cluster init --wait 60 > /dev/null
exec "$BIN/magnetar" "$@"
