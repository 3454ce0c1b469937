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
  # Most of the ten thousand files are never imported; Python compiles what is.
  .venv/bin/pip install --quiet --disable-pip-version-check --no-compile \
      --editable ".[$1]"
}
