package lb

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// ParseAddr parses an address as kube-proxy does: leading zeros are accepted
// and ignored, so 10.0.0.010 is 10.0.0.10. An IPv4 address that is written
// as IPv6 (::ffff:10.0.0.1) is IPv4. Space and zones (fe80::1%eth0) are errors.
func ParseAddr(s string) (netip.Addr, error) {
	addr, err := parseMapped(s)
	return addr.Unmap(), err
}

// ParsePrefix parses an address range as kube-proxy does: like [ParseAddr], but it drops
// space around the text and bits behind the prefix.
func ParsePrefix(s string) (netip.Prefix, error) {
	s = strings.TrimSpace(s)
	text, length, found := strings.Cut(s, "/")
	if !found {
		return netip.Prefix{}, fmt.Errorf("%q is not an address range: no slash", s)
	}
	addr, err := parseMapped(text)
	if err != nil {
		return netip.Prefix{}, err
	}
	bits, err := strconv.ParseUint(length, 10, 8)
	if err != nil || int(bits) > addr.BitLen() {
		return netip.Prefix{}, fmt.Errorf("%q is not an address range: bad prefix length", s)
	}
	if addr.Is4In6() {
		if bits < 96 {
			return netip.Prefix{}, fmt.Errorf("%q is not an address range: IPv4 and IPv6 at once", s)
		}
		addr, bits = addr.Unmap(), bits-96
	}
	return netip.PrefixFrom(addr, int(bits)).Masked(), nil
}

// parseMapped is ParseAddr but for the last step.
func parseMapped(s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(trimZeros(s))
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", s)
	}
	return addr, nil
}

// trimZeros drops the leading zeros of every number in an address.
func trimZeros(s string) string {
	trimmed := make([]byte, 0, len(s))
	leading := true
	for i := range len(s) {
		last := i+1 == len(s) || isSeparator(s[i+1])
		if leading && s[i] == '0' && !last {
			continue
		}
		leading = isSeparator(s[i])
		trimmed = append(trimmed, s[i])
	}
	return string(trimmed)
}

func isSeparator(c byte) bool { return c == '.' || c == ':' }
