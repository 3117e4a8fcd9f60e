"""Sends each line of its input as a datagram, on a socket that connects once."""

import asyncio
import sys


class Protocol(asyncio.DatagramProtocol):
    def datagram_received(self, data, addr):
        print(data.decode(), flush=True)

    def error_received(self, exc):
        print(exc, file=sys.stderr, flush=True)


async def main(address, port):
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Protocol, remote_addr=(address, int(port)))
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        transport.sendto(line.rstrip().encode())


asyncio.run(main(*sys.argv[1:]))
