#!/bin/sh
# One question over plain HTTP: whole, then streamed. Usage: examples/curl.sh [BASE_URL [MODEL]]
set -eu
base=${1:-http://127.0.0.1:8000}
model=${2:-nano}

ask() {
    curl --silent --show-error --fail-with-body --no-buffer "$base/v1/chat/completions" \
        --header 'content-type: application/json' \
        ${DEEPINFER_API_KEY:+--header "authorization: Bearer $DEEPINFER_API_KEY"} \
        --data "$1"
}

curl --silent --show-error --fail-with-body "$base/v1/models"
echo
ask '{"model": "'"$model"'", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}'
echo
ask '{"model": "'"$model"'", "stream": true, "stream_options": {"include_usage": true},
      "messages": [{"role": "user", "content": "Who are you?"}]}'
