package main

import "testing"

func TestMarkFlagRefuses(t *testing.T) {
	for _, text := range []string{"", "0", "0/0xff", "x", "1/x", "0x100/0x200", "0x100000000", "-1", "1/"} {
		var f markFlag
		if err := f.Set(text); err == nil {
			t.Errorf("%q is %s, want an error", text, f.String())
		}
	}
}
