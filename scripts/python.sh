# Other scripts source this file. It makes .venv with Python 3.12 or newer, and installs
# jaxlora into it.
# usage: set_up EXTRAS

find_python() {
  local fits='import sys; sys.exit(sys.version_info < (3, 12))'
  for candidate in "${PYTHON:-}" python3.12 python3.13 python3.14 python3 \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    if [ -n "$candidate" ] && "$candidate" -c "$fits" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "jaxlora needs Python 3.12 or newer; set PYTHON to one." >&2
  return 1
}

set_up() {
  if [ ! -x .venv/bin/pip ]; then
    local python
    python="$(find_python)"
    echo "Installing into .venv with $python. This takes a minute or two."
    "$python" -m venv .venv
  fi
  local own
  own="$(.venv/bin/pip config list)"
  if grep -Eq '[.](index-url|no-index|proxy)=' <<<"$own"; then
    echo "Installing by pip, as its settings name an index or a proxy; uv does not read them."
    .venv/bin/pip install --quiet --disable-pip-version-check --no-compile \
        --editable ".[$1]"
    return
  fi
  if [ ! -x .venv/bin/uv ]; then
    .venv/bin/pip install --quiet --disable-pip-version-check uv
  fi
  # pip takes several times as long to choose versions and to write ten thousand files.
  # As pip does, uv trusts the certificates of the system.
  .venv/bin/uv pip install --quiet --system-certs --python .venv/bin/python \
      --editable ".[$1]"
}
