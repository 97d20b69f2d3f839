#!/usr/bin/env bash
# The site, from the notebooks: `tools/docs.sh [FOLDER]` writes it to FOLDER (_docs). Any host serves these files; no page asks another host for anything.
# Needs the extra `docs`. tools/docs.py turns notebooks into Markdown, zensical turns that into HTML.
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../_docs}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -W ignore tools/docs.py "$work"
(cd "$work" && python -m zensical build --strict -f mkdocs.yml)
python -W ignore tools/docs.py "$work"
rm -rf "$out" && mkdir -p "$(dirname "$out")" && mv "$work/site" "$out"
