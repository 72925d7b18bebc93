"""A plain TCP transfer between two hosts: how many payload bytes a second a link carries.

python -m benchmarks.comm_wire receive ADDRESS PORT      prints the rate
python -m benchmarks.comm_wire send ADDRESS PORT
"""

from __future__ import annotations

import socket
import sys
import time

TOTAL_BYTES = 32 << 20
SKIPPED_BYTES = 2 << 20
"""They find the link's bucket of burst bytes full, and TCP in slow start."""
CONNECT_S = 20.0


def receive(address: str, port: int) -> float:
    """Return the bytes a second of the transfer that comes first."""
    buffer = bytearray(1 << 20)
    with socket.create_server((address, port)) as server:
        connection, _ = server.accept()
    received, begin_s, begin_bytes = 0, 0.0, 0
    with connection:
        while num_bytes := connection.recv_into(buffer):
            received += num_bytes
            if not begin_s and received >= SKIPPED_BYTES:
                begin_s, begin_bytes = time.perf_counter(), received
        return (received - begin_bytes) / (time.perf_counter() - begin_s)


def send(address: str, port: int) -> None:
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection((address, port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    with connection:
        connection.sendall(bytes(TOTAL_BYTES))


def main() -> None:
    side, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if side == "receive":
        print(receive(address, port))
    else:
        send(address, port)


if __name__ == "__main__":
    main()
