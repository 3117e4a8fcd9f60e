#!/usr/bin/env bash
# Sends each line of its input as a datagram, on a socket that connects once.
exec 3<>"/dev/udp/$1/$2"
while read -r line; do
	echo "$line" >&3
done
