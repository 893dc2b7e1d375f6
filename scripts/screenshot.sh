#!/usr/bin/env bash
# A picture of an HTML report, whole page, by a headless Chromium that is installed where there is none.
#   scripts/screenshot.sh REPORT.html OUT.png [light|dark] [WIDTH] [MOST_HEIGHT]      default: light 1200, all of it
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,3s/^# \{0,1\}//p' "$0" >&2; exit 2; }
page=$(realpath "$1") out=$2 scheme=${3:-light} width=${4:-1200} most=${5:-100000}
case $scheme in light) preferred=1 ;; dark) preferred=0 ;; *) echo "screenshot: expected light or dark, found $scheme" >&2; exit 2 ;; esac

find_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
if ! browser=$(find_browser); then
  command -v apt-get >/dev/null || { echo "screenshot: needs Chromium; no apt-get to install it with" >&2; exit 1; }
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  $sudo apt-get update -qq >&2
  $sudo apt-get install -y -qq --no-install-recommends chromium fonts-liberation fonts-dejavu-core >&2
  browser=$(find_browser)
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
  "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/profile" \
    --blink-settings=preferredColorScheme="$preferred" "$@" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
}
# a window is only as high as it is told: a frame around the page tells how high the page is. Windows are no narrower
# than 500, so that a phone's width is a frame too.
cat >"$work/frame.html" <<HTML
<!DOCTYPE html><title>frame</title><style>body{margin:0}iframe{border:0;width:${width}px;height:100px;display:block}</style>
<iframe src="file://$page" onload="const h=this.contentDocument.documentElement.scrollHeight;this.style.height=h+'px';document.title=h;"></iframe>
HTML
height=$(run --allow-file-access-from-files --virtual-time-budget=2000 --window-size="$width,800" --dump-dom "file://$work/frame.html" |
  grep -o '<title>[0-9]*' | grep -o '[0-9]*')
height=$((height < most ? height : most))
run --allow-file-access-from-files --virtual-time-budget=2000 --window-size="$width,$height" --screenshot="$work/out.png" "file://$work/frame.html"
mv "$work/out.png" "$out"
echo "$out: $width x $height"
