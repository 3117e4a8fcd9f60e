package datapath

import (
	"os"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == ProbeVerb {
		os.Exit(ProbeMain(os.Args[2]))
	}
	playScene()
	lab.Main()
	os.Exit(m.Run())
}
