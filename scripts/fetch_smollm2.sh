#!/usr/bin/env bash
exec bash "$(dirname "${BASH_SOURCE[0]}")/fetch_model.sh" SmolLM2-135M "$@"
