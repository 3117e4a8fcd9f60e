package reconcile

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// tamper writes to the maps behind the Reconciler's back:
//
//	slot 1 = 99
//	backend 9 = 10.0.1.7:8080 3
//	name 7 = default/web
//	pool 3 = service-port base count, or service-port base count table-base table-size algorithm
//	place 7 = 10.96.0.9:80 pool
//	frontend 10.96.0.9:80 = frontend-id
//	addr 10.96.0.9 = ifindex flags
//	device 3 = 192.168.1.2
//	local-cidr 10.244.0.0/16 = 1
//	delete backend 1
//	delete frontend 10.96.0.1:80
//	delete name 1
//	delete addr 10.96.0.1
//	delete device 2
//	delete local-cidr 10.244.0.0/16
func (s *script) tamper(body string) {
	s.t.Helper()
	for line := range strings.Lines(body) {
		words := strings.Fields(line)
		var err error
		if words[0] == "delete" {
			err = s.tamperDelete(words[1], words[2])
		} else {
			err = s.tamperPut(words[0], words[1], words[3:])
		}
		if err != nil {
			s.t.Fatalf("%q: %v", line, err)
		}
	}
}

func (s *script) tamperDelete(what, key string) error {
	switch what {
	case "backend":
		return s.tables.Backends.Put(s.number(key), maps.Backend{})
	case "name":
		return s.tables.ServicePorts.Delete(s.number(key))
	case "frontend":
		return s.tables.FrontendIDs.Delete(s.internalKey(key))
	case "addr":
		return s.tables.Addrs.Delete(maps.AddrOf(netip.MustParseAddr(key)))
	case "device":
		return s.tables.Devices.Delete(s.number(key))
	case "local-cidr":
		return s.tables.LocalCIDRs.Delete(maps.CIDRKeyOf(netip.MustParsePrefix(key)))
	default:
		return errors.New("delete what?")
	}
}

func (s *script) tamperPut(what, key string, value []string) error {
	switch what {
	case "slot":
		return s.tables.Slots.Put(s.number(key), s.number(value[0]))
	case "backend":
		return s.tables.Backends.Put(s.number(key), maps.BackendOf(s.number(key), s.number(value[1]), netip.MustParseAddrPort(value[0]), 0))
	case "name":
		namespace, name, _ := strings.Cut(value[0], "/")

		return s.tables.ServicePorts.Put(s.number(key), maps.ServicePortOf(namespace, name, "", 6, 4))
	case "frontend":
		return s.tables.FrontendIDs.Put(s.internalKey(key), s.number(value[0]))
	case "place":
		return s.tables.Frontends.Put(s.number(key), maps.Frontend{
			Key: s.internalKey(value[0]), PoolId: s.number(value[1]), Kind: maps.KindClusterIP,
		})
	case "pool":
		return s.tables.Pools.Put(s.number(key), s.pool(value))
	case "addr":
		return s.tables.Addrs.Put(maps.AddrOf(netip.MustParseAddr(key)), maps.AddrUse{Ifindex: s.number(value[0]), Flags: s.number(value[1])})
	case "device":
		return s.tables.Devices.Put(s.number(key), maps.Device{SourceV4: maps.AddrOf(netip.MustParseAddr(value[0]))})
	case "local-cidr":
		return s.tables.LocalCIDRs.Put(maps.CIDRKeyOf(netip.MustParsePrefix(key)), s.number(value[0]))
	default:
		return errors.New("put what?")
	}
}

func (s *script) pool(value []string) maps.Pool {
	v := maps.Pool{ServicePortId: s.number(value[0]), SlotBase: s.number(value[1]), SlotCount: s.number(value[2])}
	if len(value) > 3 {
		algorithm, err := lb.ParseAlgorithm(value[5])
		if err != nil {
			s.t.Fatal(err)
		}
		v.TableBase, v.TableSize, v.Algorithm = s.number(value[3]), s.number(value[4]), programmable(algorithm)
	}

	return v
}

func (s *script) internalKey(text string) maps.FrontendKey {
	addr, protocol := mustParseVIP(s.t, text)

	return maps.FrontendKeyOf(addr.Addr(), addr.Port(), uint8(protocol), maps.ScopeInternal)
}

func (s *script) number(text string) uint32 {
	s.t.Helper()
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		s.t.Fatal(err)
	}

	return uint32(n)
}

// mustParseNodeAddrs reads "192.168.1.2", an address of device 2, or
// "192.168.1.2 node-port".
func mustParseNodeAddrs(t *testing.T, body string) map[netip.Addr]maps.AddrUse {
	t.Helper()
	addrs := make(map[netip.Addr]maps.AddrUse)
	for line := range strings.Lines(body) {
		addr, option, _ := strings.Cut(strings.TrimSpace(line), " ")
		use := maps.AddrUse{Ifindex: 2}
		if option == "node-port" {
			use.Flags = maps.AddrNodePort
		}
		addrs[netip.MustParseAddr(addr)] = use
	}

	return addrs
}

// mustParseDevices reads "2 192.168.1.2 fd00::1 bridge=7".
func mustParseDevices(t *testing.T, body string) map[uint32]maps.Device {
	t.Helper()
	devices := make(map[uint32]maps.Device)
	for line := range strings.Lines(body) {
		var ifindex uint32
		var device maps.Device
		for i, word := range strings.Fields(line) {
			var err error
			switch addr, none := netip.ParseAddr(word); {
			case i == 0:
				_, err = fmt.Sscan(word, &ifindex)
			case none != nil:
				_, err = fmt.Sscanf(word, "bridge=%d", &device.Bridge)
			case addr.Is4():
				device.SourceV4 = maps.AddrOf(addr)
			default:
				device.SourceV6 = maps.AddrOf(addr)
			}
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
		}
		devices[ifindex] = device
	}

	return devices
}

func mustParsePrefixes(t *testing.T, body string) []netip.Prefix {
	t.Helper()
	var prefixes []netip.Prefix
	for line := range strings.Lines(body) {
		prefixes = append(prefixes, netip.MustParsePrefix(strings.TrimSpace(line)))
	}

	return prefixes
}
