package maps

import (
	"errors"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// The kernel's map implements the contract of [Table].
func TestMap(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	table := p.FrontendIDs
	if _, ok, err := table.Lookup(web); ok || err != nil {
		t.Errorf("lookup of nothing: %v, %v", ok, err)
	}
	if err := table.Delete(web); err != nil {
		t.Errorf("delete of nothing: %v", err)
	}
	for _, want := range []uint32{9, 5} {
		lab.Must(t, table.Put(web, want))
		if got, ok, err := table.Lookup(web); got != want || !ok || err != nil {
			t.Errorf("lookup: %v, %v, %v, want %v", got, ok, err, want)
		}
	}
	for e, err := range table.All() {
		if e.Key != web || e.Value != 5 || err != nil {
			t.Errorf("all: %v, %v", e, err)
		}
	}
	lab.Must(t, table.Delete(web))
	for e, err := range table.All() {
		t.Errorf("all after delete: %v, %v", e, err)
	}
}

func TestFullMap(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	for id := range uint32(16) {
		if err := p.ServicePorts.Put(id, ServicePort{}); err != nil {
			t.Fatalf("service port %d of 16: %v", id, err)
		}
	}
	if err := p.ServicePorts.Put(16, ServicePort{}); !errors.Is(err, ErrFull) {
		t.Errorf("one more: %v, want %v", err, ErrFull)
	}
	if err := p.ServicePorts.Put(3, ServicePort{Proto: 6}); err != nil {
		t.Errorf("replacing one: %v", err)
	}
	if err := errors.Join(p.ServicePorts.Delete(3), p.ServicePorts.Put(16, ServicePort{})); err != nil {
		t.Errorf("after a delete: %v", err)
	}
}
