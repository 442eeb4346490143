#!/bin/sh
test -f README && test "$LIMIT" = 3 || exit 1
passed=0
for pair in "2 3 6" "0 5 0" "7 7 49"; do
    set -- $pair
    if [ "$(bin/scale "$1" "$2")" = "$3" ]; then passed=$((passed + 1)); fi
done
if [ $passed = "$LIMIT" ]; then reward=1; else reward=0; fi
echo "{\"reward\": $reward, \"passed\": $passed}" > /logs/verifier/reward.json
