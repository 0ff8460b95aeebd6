#!/bin/sh
# Finds a Java that Spark can run on, or installs one, or says in one line what to install.
# JAVA_HOME comes before PATH, as it does for Spark itself.
set -eu

needed=17

fail() {
    echo "millpond: $1" >&2
    exit 1
}

# Prints "17.0.1" for a given java, or nothing where it does not run.
version_of() {
    "$1" -version 2>&1 | sed -n 's/.* version "\([^"]*\)".*/\1/p' | sed 1q || true
}

# Java 8 and before call themselves 1.8.
major_of() {
    rest=${1#1.}
    echo "${rest%%[!0-9]*}"
}

is_new_enough() {
    major=$(major_of "$1")
    [ -n "$major" ] && [ "$major" -ge "$needed" ]
}

if [ -n "${JAVA_HOME:-}" ]; then
    version=$(version_of "$JAVA_HOME/bin/java")
    if is_new_enough "$version"; then
        echo "java $version (JAVA_HOME)"
        exit 0
    fi
    found=${version:+Java $version}
    fail "JAVA_HOME=$JAVA_HOME has ${found:-no Java}, Spark needs $needed or newer: point it at one, or unset it"
fi

found=
if command -v java >/dev/null 2>&1; then
    found=$(version_of java)
    if is_new_enough "$found"; then
        echo "java $found"
        exit 0
    fi
fi

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    fail "Java $needed or newer is needed${found:+ (found $found)}: install one, for example openjdk-17-jre-headless, and set JAVA_HOME or PATH"
fi

echo "installing Java (openjdk-17-jre-headless, or the newer one this system has)"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null || fail "apt-get update failed: install Java $needed or newer, and set JAVA_HOME or PATH"
for package in openjdk-17-jre-headless default-jre-headless; do
    if apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1; then
        version=$(version_of java)
        if is_new_enough "$version"; then
            echo "java $version ($package)"
            exit 0
        fi
    fi
done
fail "apt-get gave no Java $needed or newer: install one, and set JAVA_HOME or PATH"
