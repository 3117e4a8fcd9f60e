package maps

// Tables are the maps that the agent writes.
type Tables struct {
	Frontends    Table[FrontendKey, Frontend]
	Slots        Slots
	Backends     Table[uint32, Backend]        // by backend id
	ServicePorts Table[uint32, ServicePort]    // by frontend id
	NodeAddrs    Table[Addr, NodeAddr]         //
	SourceRanges Table[SourceRangeKey, uint32] // the value is always 1
	ServiceCIDRs Table[ServiceCIDRKey, uint32] // the value is always 1
}

// Names of the maps, as their pins have them.
const (
	NameFrontends    = "frontends"
	NameSlots        = "slots"
	NameBackends     = "backends"
	NameServicePorts = "service_ports"
	NameNodeAddrs    = "node_addrs"
	NameSourceRanges = "source_ranges"
	NameServiceCIDRs = "service_cidrs"
	NameAffinity     = "affinity"
	NameSockState    = "sock_state"
	NameUDPPins      = "udp_pins"
	NameReasons      = "reasons"
)

// Fakes are [Tables] in memory, for tests and dry runs.
type Fakes struct {
	Tables
	Frontends    *FakeTable[FrontendKey, Frontend]
	Slots        *FakeSlots
	Backends     *FakeTable[uint32, Backend]
	ServicePorts *FakeTable[uint32, ServicePort]
	NodeAddrs    *FakeTable[Addr, NodeAddr]
	SourceRanges *FakeTable[SourceRangeKey, uint32]
	ServiceCIDRs *FakeTable[ServiceCIDRKey, uint32]
}

// NewFakes returns empty fake tables with room for slots slots.
func NewFakes(slots int) *Fakes {
	f := &Fakes{
		Frontends:    newFakeTable[FrontendKey, Frontend](NameFrontends),
		Slots:        &FakeSlots{IDs: make([]uint32, slots)},
		Backends:     newFakeTable[uint32, Backend](NameBackends),
		ServicePorts: newFakeTable[uint32, ServicePort](NameServicePorts),
		NodeAddrs:    newFakeTable[Addr, NodeAddr](NameNodeAddrs),
		SourceRanges: newFakeTable[SourceRangeKey, uint32](NameSourceRanges),
		ServiceCIDRs: newFakeTable[ServiceCIDRKey, uint32](NameServiceCIDRs),
	}
	f.Tables = Tables{
		Frontends: f.Frontends, Slots: f.Slots, Backends: f.Backends,
		ServicePorts: f.ServicePorts, NodeAddrs: f.NodeAddrs,
		SourceRanges: f.SourceRanges, ServiceCIDRs: f.ServiceCIDRs,
	}

	return f
}

// Observe sets Fail and Wrote of every table (the slots have no Fail: memory
// does not refuse a write).
func (f *Fakes) Observe(fail func(table, operation string) error, wrote func(table, operation string)) {
	f.Frontends.Fail, f.Frontends.Wrote = fail, wrote
	f.Backends.Fail, f.Backends.Wrote = fail, wrote
	f.ServicePorts.Fail, f.ServicePorts.Wrote = fail, wrote
	f.NodeAddrs.Fail, f.NodeAddrs.Wrote = fail, wrote
	f.SourceRanges.Fail, f.SourceRanges.Wrote = fail, wrote
	f.ServiceCIDRs.Fail, f.ServiceCIDRs.Wrote = fail, wrote
	f.Slots.Wrote = nil
	if wrote != nil {
		f.Slots.Wrote = func() { wrote(NameSlots, "put") }
	}
}

func newFakeTable[K comparable, V any](name string) *FakeTable[K, V] {
	return &FakeTable[K, V]{TableName: name, Entries: map[K]V{}}
}
