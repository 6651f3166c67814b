"""MySQL and MariaDB as a source: the binlog."""
