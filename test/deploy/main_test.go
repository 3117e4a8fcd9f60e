package deploy

import (
	"os"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	becomeNode()
	becomeContainer()
	lab.Main()
	os.Exit(m.Run())
}
