// Bench measures Sluice beside the real kube-proxy, and beside a node without
// either, in one run on this machine, and writes a report: text, JSON and plots.
//
//	bin/sluice-bench --help
//
// All of it happens in network namespaces of its own. It must be root.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/test/lab"
)

func main() {
	lab.Main()
	load.Main()
	proxy.Main()
	// The first signal ends the run and keeps what it has; a second one ends the program.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	context.AfterFunc(ctx, stop)
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}
