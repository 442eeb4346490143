#!/bin/sh
touch /var/beat && cp /var/beat /logs/artifacts && test -d /logs/agent || exit 1
before=$(wc -l < /var/beat)
sleep 0.5
runs() { [ "$(wc -l < /var/beat)" -gt "$before" ] && cat /proc/[0-9]*/cmdline | grep -aq "echo [b]eat"; }
if runs; then echo 1.0; else echo 0.0; fi > /logs/verifier/reward.txt
