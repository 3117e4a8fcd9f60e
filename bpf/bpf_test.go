package bpf

import (
	"testing"

	"github.com/sluice-lb/sluice/maps/mapstest"
)

// Every hook of the datapath has a program, and its name is known without one.
func TestHooks(t *testing.T) {
	programs := mustLoad(t, mapstest.MustCreate(t, nil), Config{UDP: UDPAll, Handshakes: knowsTracing(t), Resteer: true})
	named := SockHooks()
	if len(programs.Sock) != len(named) {
		t.Fatalf("%d hooks loaded, %d named", len(programs.Sock), len(named))
	}
	for i, hook := range programs.Sock {
		if hook.Name != named[i].Name || hook.Attach != named[i].Attach {
			t.Errorf("hook %s loaded, %s named", hook.Name, named[i].Name)
		}
		if hook.Program == nil {
			t.Errorf("hook %s has no program", hook.Name)
		}
		if len(hook.Name) > 15 {
			t.Errorf("hook %s: the name is too long", hook.Name)
		}
	}
	if programs.Socks == nil {
		t.Error("no socket iterator")
	}
}
