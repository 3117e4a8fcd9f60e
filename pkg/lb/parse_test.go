package lb

import "testing"

func TestParseAddr(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"IPv4", "10.0.0.1", "10.0.0.1"},
		{"IPv6", "fd00::1", "fd00::1"},
		{"canonical", "FD00:0:0:0:0:0:0:0001", "fd00::1"},
		{"decimal despite leading zeros", "172.30.0.041", "172.30.0.41"},
		{"decimal despite many leading zeros", "0010.0000.00.0000099", "10.0.0.99"},
		{"IPv6 with leading zeros", "02001:0db8:00000::01", "2001:db8::1"},
		{"IPv4 though written as IPv6", "::ffff:10.0.0.1", "10.0.0.1"},
		{"IPv4 though written as IPv6 with leading zeros", "::ffff:010.0.0.01", "10.0.0.1"},
		{"IPv6 that ends as IPv4", "64:ff9b::10.0.0.010", "64:ff9b::a00:a"},
		{"all zeros", "000.0.0.0", "0.0.0.0"},
		{"an error if blank", "", ""},
		{"an error with space", " 10.0.0.1", ""},
		{"an error with a zone", "fe80::1%eth0", ""},
		{"an error if too big", "10.0.0.256", ""},
		{"an error if too short", "10.0.1", ""},
		{"an error with an empty number", "10..0.1", ""},
		{"an error in hexadecimal", "0x0a.0.0.1", ""},
		{"an error as a range", "10.0.0.0/8", ""},
		{"an error as a name", "localhost", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			addr, err := ParseAddr(test.text)
			got := ""
			if err == nil {
				got = addr.String()
			}
			if got != test.want || addr.IsValid() != (err == nil) {
				t.Errorf("ParseAddr(%q) = %v, %v; want %q", test.text, addr, err, test.want)
			}
		})
	}
}

func TestParsePrefix(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"IPv4", "10.0.0.0/8", "10.0.0.0/8"},
		{"IPv6", "fd00::/64", "fd00::/64"},
		{"masked", "10.1.2.3/8", "10.0.0.0/8"},
		{"decimal despite leading zeros", "203.0.113.000/025", "203.0.113.0/25"},
		{"trimmed", "  203.0.113.7/32 \n", "203.0.113.7/32"},
		{"everybody", "0.0.0.0/0", "0.0.0.0/0"},
		{"IPv4 though written as IPv6", "::ffff:10.1.2.3/104", "10.0.0.0/8"},
		{"an error as IPv4 and IPv6 at once", "::ffff:10.1.2.3/95", ""},
		{"an error without length", "10.0.0.0", ""},
		{"an error with an empty length", "10.0.0.0/", ""},
		{"an error if too long", "10.0.0.0/33", ""},
		{"an error if far too long", "fd00::/129", ""},
		{"an error with a signed length", "10.0.0.0/+8", ""},
		{"an error with a mask", "10.0.0.0/255.0.0.0", ""},
		{"an error with space inside", "10.0.0.0 /8", ""},
		{"an error with a zone", "fe80::1%eth0/64", ""},
		{"an error if blank", " ", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			prefix, err := ParsePrefix(test.text)
			got := ""
			if err == nil {
				got = prefix.String()
			}
			if got != test.want || prefix.IsValid() != (err == nil) {
				t.Errorf("ParsePrefix(%q) = %v, %v; want %q", test.text, prefix, err, test.want)
			}
		})
	}
}
