// Package senders has programs that people use send datagrams to Services: each connects once, as most programs do that
// send logs, metrics or queries, and has to reach its Service for as long as it runs.
package senders

import (
	"os"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("cni")
	os.Exit(m.Run())
}
