#!/usr/bin/env bash
# Lints the shell scripts; says so when shellcheck is missing and can't be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dev/packages.sh ensure shellcheck
mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
shellcheck --external-sources --shell=bash --severity=warning "${scripts[@]}"
echo "shellcheck: ${#scripts[@]} scripts are clean"
