#!/bin/sh
test -f /tests/expected || exit 1
if [ "$(tr -d ' \n' < /app/answer.txt)" = "$(cat /tests/expected)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
