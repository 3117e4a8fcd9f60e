package maps

// Tables are the maps that the agent writes.
type Tables struct {
	Frontends    Table[FrontendKey, Frontend]
	Slots        Slots
	Backends     Table[uint32, Backend]        // by backend id
	ServicePorts Table[uint32, ServicePort]    // by frontend id
	Addrs        Table[Addr, AddrUse]          //
	Devices      Table[uint32, Device]         // by ifindex
	SourceRanges Table[SourceRangeKey, uint32] // the value is always 1
	ServiceCIDRs Table[CIDRKey, uint32]        // the value is always 1
	LocalCIDRs   Table[CIDRKey, uint32]        // the value is always 1
	Loads        Loads                         // programs and package flow write them
}

// Names of the maps, as their pins have them.
const (
	NameFrontends    = "frontends"
	NameSlots        = "slots"
	NameBackends     = "backends"
	NameServicePorts = "service_ports"
	NameAddrs        = "addrs"
	NameDevices      = "devices"
	NameSourceRanges = "source_ranges"
	NameServiceCIDRs = "service_cidrs"
	NameLocalCIDRs   = "local_cidrs"
	NameAffinity     = "affinity"
	NameSockState    = "sock_state"
	NameUDPPins      = "udp_pins"
	NameFlows        = "flows"
	NameHalfOpen     = "half_open"
	NameEgressUse    = "egress_use"
	NameFlowCounts   = "flow_counts"
	NameFragments    = "fragments"
	NameICMPBudgets  = "icmp_budgets"
	NameReasons      = "reasons"
	NameBackendLoad  = "backend_load"
	NameTurns        = "turns"
	NameStats        = "stats"
)

// Fakes are [Tables] in memory, for tests and dry runs.
type Fakes struct {
	Tables
	Frontends    *FakeTable[FrontendKey, Frontend]
	Slots        *FakeSlots
	Backends     *FakeTable[uint32, Backend]
	ServicePorts *FakeTable[uint32, ServicePort]
	Addrs        *FakeTable[Addr, AddrUse]
	SourceRanges *FakeTable[SourceRangeKey, uint32]
	ServiceCIDRs *FakeTable[CIDRKey, uint32]
	LocalCIDRs   *FakeTable[CIDRKey, uint32]
	Devices      *FakeTable[uint32, Device]
	Loads        FakeLoads
}

// NewFakes returns empty fake tables with room for slots slots.
func NewFakes(slots int) *Fakes {
	f := &Fakes{
		Frontends:    newFakeTable[FrontendKey, Frontend](NameFrontends),
		Slots:        &FakeSlots{IDs: make([]uint32, slots)},
		Backends:     newFakeTable[uint32, Backend](NameBackends),
		ServicePorts: newFakeTable[uint32, ServicePort](NameServicePorts),
		Addrs:        newFakeTable[Addr, AddrUse](NameAddrs),
		SourceRanges: newFakeTable[SourceRangeKey, uint32](NameSourceRanges),
		ServiceCIDRs: newFakeTable[CIDRKey, uint32](NameServiceCIDRs),
		LocalCIDRs:   newFakeTable[CIDRKey, uint32](NameLocalCIDRs),
		Devices:      newFakeTable[uint32, Device](NameDevices),
		Loads:        FakeLoads{},
	}
	f.Tables = Tables{
		Frontends: f.Frontends, Slots: f.Slots, Backends: f.Backends,
		ServicePorts: f.ServicePorts, Addrs: f.Addrs,
		SourceRanges: f.SourceRanges, ServiceCIDRs: f.ServiceCIDRs,
		LocalCIDRs: f.LocalCIDRs, Devices: f.Devices, Loads: f.Loads,
	}

	return f
}

// Observe sets Fail and Wrote of every table (the slots have no Fail: memory
// does not refuse a write).
func (f *Fakes) Observe(fail func(table, operation string) error, wrote func(table, operation string)) {
	f.Frontends.Fail, f.Frontends.Wrote = fail, wrote
	f.Backends.Fail, f.Backends.Wrote = fail, wrote
	f.ServicePorts.Fail, f.ServicePorts.Wrote = fail, wrote
	f.Addrs.Fail, f.Addrs.Wrote = fail, wrote
	f.SourceRanges.Fail, f.SourceRanges.Wrote = fail, wrote
	f.ServiceCIDRs.Fail, f.ServiceCIDRs.Wrote = fail, wrote
	f.LocalCIDRs.Fail, f.LocalCIDRs.Wrote = fail, wrote
	f.Devices.Fail, f.Devices.Wrote = fail, wrote
	f.Slots.Wrote = nil
	if wrote != nil {
		f.Slots.Wrote = func() { wrote(NameSlots, "put") }
	}
}

func newFakeTable[K comparable, V any](name string) *FakeTable[K, V] {
	return &FakeTable[K, V]{TableName: name, Entries: map[K]V{}}
}
