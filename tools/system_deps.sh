#!/bin/sh
# Installs what tests and benchmarks use of the system, where this is Debian and we may. Elsewhere it
# says what is missing, and what needs it is skipped: never an error.
set -u

have_postgresql() {
    command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

have_mariadb() {
    { command -v mariadbd || ls /usr/sbin/mariadbd; } >/dev/null 2>&1 &&
        command -v mariadb-install-db >/dev/null 2>&1 &&
        command -v my_print_defaults >/dev/null 2>&1
}

install() {
    command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ] || return 0
    [ -n "${updated:-}" ] || apt-get update -qq >/dev/null 2>&1
    updated=yes
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null 2>&1
}

if ! have_postgresql; then
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        # No cluster of the system's own: each use starts a server in a folder of its own.
        mkdir -p /etc/postgresql-common
        [ -e /etc/postgresql-common/createcluster.conf ] ||
            echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
    fi
    install postgresql
fi
# Only the programs: the package mariadb-server would start a service.
have_mariadb || install mariadb-server-core mariadb-client-core

command -v kcat >/dev/null 2>&1 || install kcat

have_postgresql ||
    echo "system-deps: PostgreSQL is missing, so what needs it is skipped. Debian: apt-get install postgresql"
have_mariadb ||
    echo "system-deps: MariaDB is missing, so what needs it is skipped. Debian: apt-get install mariadb-server-core mariadb-client-core"
command -v kcat >/dev/null 2>&1 ||
    echo "system-deps: kcat is missing, so its tests are skipped. Debian: apt-get install kcat"
exit 0
