package status

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// A client whose affinity would have ended counts no more, though its entry stays.
func TestAffinitiesInForce(t *testing.T) {
	pinned := mapstest.MustCreate(t, nil)
	lab.Must(t, pinned.Pools.Put(1, maps.Pool{ServicePortId: 1, AffinitySeconds: 10}))
	lab.Must(t, pinned.Pools.Put(2, maps.Pool{ServicePortId: 2, AffinitySeconds: 3600}))
	for i, age := range []time.Duration{0, 59 * time.Minute, 61 * time.Minute} {
		lab.Must(t, pinned.Affinity.Put(maps.AffinityKey{ServicePortId: uint32(i + 1)}, maps.Affinity{LastUsed: maps.Now() - uint64(age)}))
	}
	if got, err := countAffinities(pinned); got != 2 || err != nil {
		t.Errorf("%d entries count (%v), want 2 of 3", got, err)
	}
}
