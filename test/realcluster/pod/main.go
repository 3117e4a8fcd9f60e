// Pod is what the pods of a test cluster run:
//
//	pod pause          does nothing until it is ended, as the sandbox of each pod
//	pod serve          answers at port 8080 over TCP and UDP, see [lab.Server]
//	pod call           does what its standard input asks for, see [lab.CallThrough]
//	pod lookup NAME    prints the addresses of a name, one a line
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pod:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()

	switch {
	case len(args) == 1 && args[0] == "pause":
		<-ctx.Done()

		return nil
	case len(args) == 1 && args[0] == "serve":
		return serve(ctx)
	case len(args) == 1 && args[0] == "call":
		return lab.ServeCalls(os.Stdin, os.Stdout)
	case len(args) == 2 && args[0] == "lookup":
		addresses, err := net.DefaultResolver.LookupHost(ctx, args[1])
		for _, address := range addresses {
			fmt.Println(address)
		}

		return err
	default:
		return fmt.Errorf("arguments %q: want pause, serve, call or lookup NAME", args)
	}
}

// grace is how long a server that is asked to end goes on: clients learn of it a
// moment later than it does.
const grace = 5 * time.Second

func serve(ctx context.Context) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	server, err := lab.Serve(nil, name, "[::]:8080")
	if err != nil {
		return err
	}
	<-ctx.Done()
	time.Sleep(grace)

	return server.Stop()
}
