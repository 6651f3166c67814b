#!/bin/sh
# Installs what tests and benchmarks use of the system, where this is Debian and we may. Elsewhere it
# says what is missing, and what needs it is skipped: never an error.
set -u

have_postgresql() {
    command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

have_postgresql && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    # No cluster of the system's own: each use starts a server in a folder of its own.
    mkdir -p /etc/postgresql-common
    [ -e /etc/postgresql-common/createcluster.conf ] ||
        echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
    apt-get update -qq >/dev/null 2>&1
    apt-get install -qq -y --no-install-recommends postgresql >/dev/null 2>&1
fi
have_postgresql ||
    echo "system-deps: PostgreSQL is missing, so what needs it is skipped. Debian: apt-get install postgresql"
exit 0
