#!/bin/sh
wc -w < /app/letter.txt > /app/answer.txt
