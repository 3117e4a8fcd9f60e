package bpf

import (
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
)

// All programs can be loaded at one moment, as an agent does it: the types of the kernel and of its
// modules are read by many goroutines. The race detector shows it, in a machine with modules that
// have types.
func TestProgramsLoadAtOnce(t *testing.T) {
	m := mapstest.MustCreate(t, nil)
	knows := knowsConntrack(t)
	var loading sync.WaitGroup
	load := func(name string, load func() (interface{ Close() error }, error)) {
		loading.Go(func() {
			loaded, err := load()
			if err == nil {
				err = loaded.Close()
			}
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	load("sockets", func() (interface{ Close() error }, error) {
		return Load(m, Config{UDP: UDPAll, PodOptOut: true, Handshakes: true, Heal: true, Resteer: true})
	})
	load("iterators", func() (interface{ Close() error }, error) { return LoadIterators() })
	for _, class := range []uint32{maps.DeviceUplink, maps.DevicePods} {
		load("devices", func() (interface{ Close() error }, error) {
			return LoadDevice(m, DeviceConfig{Class: class, Conntrack: knows})
		})
	}
	loading.Wait()
}
