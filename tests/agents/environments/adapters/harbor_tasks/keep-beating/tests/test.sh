#!/bin/sh
touch /var/beat && cp /var/beat /logs/artifacts && test -d /logs/agent || exit 1
before=$(wc -l < /var/beat)
sleep 0.5
if [ "$(wc -l < /var/beat)" -gt "$before" ]; then echo 1.0; else echo 0.0; fi > /logs/verifier/reward.txt
