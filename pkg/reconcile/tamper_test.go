package reconcile

import (
	"errors"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// tamper writes to the maps behind the Reconciler's back:
//
//	slot 1 = 99
//	backend 9 = 10.0.1.7:8080 3
//	name 7 = default/web
//	frontend 10.96.0.9:80 = id base count
//	delete backend 1
//	delete frontend 10.96.0.1:80
//	delete name 1
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
		return s.tables.Backends.Delete(s.number(key))
	case "name":
		return s.tables.ServicePorts.Delete(s.number(key))
	case "frontend":
		return s.tables.Frontends.Delete(s.internalKey(key))
	default:
		return errors.New("delete what?")
	}
}

func (s *script) tamperPut(what, key string, value []string) error {
	switch what {
	case "slot":
		return s.tables.Slots.Set(s.number(key), s.number(value[0]))
	case "backend":
		return s.tables.Backends.Put(s.number(key), maps.BackendOf(netip.MustParseAddrPort(value[0]), s.number(value[1]), 0))
	case "name":
		namespace, name, _ := strings.Cut(value[0], "/")

		return s.tables.ServicePorts.Put(s.number(key), maps.ServicePortOf(namespace, name, "", 6, 4))
	case "frontend":
		return s.tables.Frontends.Put(s.internalKey(key), maps.Frontend{
			Id: s.number(value[0]), SlotBase: s.number(value[1]), SlotCount: s.number(value[2]), Kind: maps.KindClusterIP,
		})
	default:
		return errors.New("put what?")
	}
}

func (s *script) internalKey(text string) maps.FrontendKey {
	addr, protocol := mustParseDialled(s.t, text)

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

func mustParseNodeAddrs(t *testing.T, body string) map[netip.Addr]maps.AddrUse {
	t.Helper()
	addrs := make(map[netip.Addr]maps.AddrUse)
	for line := range strings.Lines(body) {
		addrs[netip.MustParseAddr(strings.TrimSpace(line))] = maps.AddrUse{Ifindex: 2, Flags: maps.AddrNodePort}
	}

	return addrs
}

func mustParsePrefixes(t *testing.T, body string) []netip.Prefix {
	t.Helper()
	var prefixes []netip.Prefix
	for line := range strings.Lines(body) {
		prefixes = append(prefixes, netip.MustParsePrefix(strings.TrimSpace(line)))
	}

	return prefixes
}
