#!/usr/bin/env bash
# Installs the program that the tests need beside Python packages, Debian's Chromium, where it is
# not there and this user may. What is missing afterwards scripts/what_cannot_run.py names.
set -uo pipefail
command -v chromium google-chrome >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
export DEBIAN_FRONTEND=noninteractive
install=(timeout 300 apt-get install -y -qq --no-install-recommends chromium)
"${install[@]}" >/dev/null 2>&1 && exit 0
timeout 120 apt-get update -qq >/dev/null 2>&1
"${install[@]}" >/dev/null 2>&1 || echo "chromium could not be installed by apt-get" >&2
exit 0
