#!/bin/sh
# Makes the virtual environment $1 with the first Python 3.11 or newer it finds, unless it is there already.
set -eu

venv=$1

fail() {
    echo "millpond: $1" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python"; then
    exit 0
fi

python=
# The names are tried by running them: a version manager's stand-in may exist and not work.
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if is_new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is needed: install it, or name it with make PYTHON=/path/to/python"

echo "creating $venv with $("$python" --version)"
if ! "$python" -m venv --clear "$venv" >/dev/null 2>&1; then
    # Debian's Python comes without ensurepip.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        echo "installing $package"
        DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
            fail "apt-get could not install $package"
        "$python" -m venv --clear "$venv" || fail "$python cannot make a virtual environment"
    else
        fail "$python cannot make a virtual environment: install its venv module (python3-venv on Debian and Ubuntu)"
    fi
fi
