// Sends each line of its input as a datagram, on a socket that connects once.
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
)

func main() {
	conn, err := net.Dial("udp", net.JoinHostPort(os.Args[1], os.Args[2]))
	if err != nil {
		panic(err)
	}
	go func() {
		answer := make([]byte, 1500)
		for {
			if n, err := conn.Read(answer); err != nil {
				fmt.Fprintln(os.Stderr, err)
			} else {
				fmt.Println(string(answer[:n]))
			}
		}
	}()
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		if _, err := conn.Write(lines.Bytes()); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}
