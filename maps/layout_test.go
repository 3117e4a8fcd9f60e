package maps

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

// An agent adopts the maps that an earlier one pinned, if their folder is of its own Version
// or StateVersion. So neither layout may change while its version stays.
func TestLayoutChangesWithVersion(t *testing.T) {
	abi := mustLoadAbi(t)
	var agent, state []string
	for name := range abi.Maps {
		if pin, ok := strings.CutPrefix(name, prefix); !ok { // .bss
			continue
		} else if slices.Contains(stateNames, pin) {
			state = append(state, name)
		} else {
			agent = append(agent, name)
		}
	}
	ofState := typesOf(abi, state)
	ofAgent := slices.DeleteFunc(mustFindTypes(t, abi.Types), func(typ btf.Type) bool {
		_, also := typesOf(abi, agent)[nameOf(typ)]
		_, only := ofState[nameOf(typ)]

		return only && !also
	})
	if len(state) != len(stateNames) {
		t.Errorf("maps of the state: %v, want %v", state, stateNames)
	}
	mustBeGolden(t, Version, describeLayout(abi, ofAgent, agent))
	mustBeGolden(t, StateVersion, describeLayout(abi, slices.Collect(maps.Values(ofState)), state))
}

// Every build reads these maps of every other build, whatever its version: their fields stay where they are,
// and only the end of a value can grow.
func TestFrozenLayout(t *testing.T) {
	abi := mustLoadAbi(t)
	frozen := []string{prefix + NameServicePorts, prefix + NameBackends, prefix + NameAddrs}
	have := describeLayout(abi, slices.Collect(maps.Values(typesOf(abi, frozen))), frozen)
	want, err := os.ReadFile(filepath.Join("testdata", "layout_frozen.txt"))
	lab.Must(t, err)
	blocks := make(map[string]string)
	for _, block := range strings.Split(have, "\n\n") {
		of, members, _ := strings.Cut(block, "\n")
		blocks[named(of)] = members
	}
	for _, block := range strings.Split(strings.TrimSpace(string(want)), "\n\n") {
		of, members, _ := strings.Cut(block, "\n")
		if !strings.HasPrefix(blocks[named(of)]+"\n", members+"\n") {
			t.Errorf("%s is now:\n%s\nwhich does not begin with:\n%s", named(of), blocks[named(of)], members)
		}
	}
}

// named returns the head of a block without the size, which may grow.
func named(head string) string {
	name, _, _ := strings.Cut(head, ":")

	return name
}

func mustLoadAbi(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	abi, err := loadAbi()
	lab.Must(t, err)

	return abi
}

func mustBeGolden(t *testing.T, version, have string) {
	t.Helper()
	golden.Match(t, filepath.Join("testdata", "layout_"+version+".txt"), have)
	if t.Failed() {
		t.Logf(`the layout of version %s has changed: maps that are pinned on a node have the old one.
Raise maps.Version or maps.StateVersion, unless no release has had %[1]s yet, or all that is new is
a number in an enum, or takes what was reserved. Then run: go test ./maps -run Layout -update`, version)
	}
}

// typesOf returns the structs that these maps consist of, by name.
func typesOf(abi *ebpf.CollectionSpec, names []string) map[string]btf.Type {
	found := make(map[string]btf.Type)
	var add func(typ btf.Type)
	members := func(members []btf.Member) {
		for _, member := range members {
			add(member.Type)
		}
	}
	add = func(typ btf.Type) {
		switch typ := typ.(type) {
		case *btf.Struct:
			found[nameOf(typ)] = typ
			members(typ.Members)
		case *btf.Union:
			members(typ.Members)
		case *btf.Array:
			add(typ.Type)
		}
	}
	for _, name := range names {
		m := abi.Maps[name]
		add(m.Key)
		if m.InnerMap != nil {
			m = m.InnerMap
		}
		add(m.Value)
	}

	return found
}

// describeLayout lists types and maps of the map ABI, byte for byte. How many entries a map
// has room for is not part of it, but for chunks.
func describeLayout(abi *ebpf.CollectionSpec, types []btf.Type, names []string) string {
	var text strings.Builder
	slices.SortFunc(types, func(a, b btf.Type) int { return cmp.Compare(nameOf(a), nameOf(b)) })
	for _, typ := range types {
		describe(&text, typ)
	}
	for _, name := range slices.Sorted(slices.Values(names)) {
		m := abi.Maps[name]
		fmt.Fprintf(&text, "map %s: %s, flags %#x\n", name, m.Type, m.Flags)
		if inner := m.InnerMap; inner != nil {
			fmt.Fprintf(&text, "\t%s -> %s of %d, flags %#x\n", nameOf(m.Key), inner.Type, inner.MaxEntries, inner.Flags)
			m = inner
		}
		fmt.Fprintf(&text, "\t%s -> %s\n\n", nameOf(m.Key), nameOf(m.Value))
	}

	return text.String()
}

// mustFindTypes returns the structs and enums that have a name, sorted by it.
func mustFindTypes(t *testing.T, spec *btf.Spec) []btf.Type {
	t.Helper()

	var found []btf.Type
	for typ, err := range spec.All() {
		lab.Must(t, err)
		switch typ.(type) {
		case *btf.Struct, *btf.Enum:
			// A chunk is not a value, but describes a map in maps.h.
			if name := typ.TypeName(); name != "" && !strings.HasSuffix(name, "_chunk") {
				found = append(found, typ)
			}
		}
	}

	return slices.SortedFunc(slices.Values(found), func(a, b btf.Type) int {
		return cmp.Compare(nameOf(a), nameOf(b))
	})
}

func describe(text *strings.Builder, typ btf.Type) {
	switch typ := typ.(type) {
	case *btf.Enum:
		fmt.Fprintf(text, "%s: %d bytes\n", nameOf(typ), typ.Size)
		for _, value := range typ.Values {
			fmt.Fprintf(text, "\t%d %s\n", value.Value, value.Name)
		}
	case *btf.Struct:
		fmt.Fprintf(text, "%s: %d bytes\n", nameOf(typ), typ.Size)
		describeMembers(text, typ.Members, 0)
	}
	text.WriteString("\n")
}

// describeMembers lists members that lie at base, those of an unnamed union one
// below the other at the same offset.
func describeMembers(text *strings.Builder, members []btf.Member, base uint32) {
	for _, member := range members {
		offset := base + member.Offset.Bytes()
		if union, ok := member.Type.(*btf.Union); ok && member.Name == "" {
			describeMembers(text, union.Members, offset)
			continue
		}
		fmt.Fprintf(text, "\t%d %s %s\n", offset, member.Name, nameOf(member.Type))
	}
}

// nameOf writes a type as C does, more or less.
func nameOf(typ btf.Type) string {
	switch typ := typ.(type) {
	case nil:
		return "nothing"
	case *btf.Struct:
		return "struct " + typ.Name
	case *btf.Enum:
		return "enum " + typ.Name
	case *btf.Array:
		return fmt.Sprintf("%s[%d]", nameOf(typ.Type), typ.Nelems)
	default:
		return typ.TypeName()
	}
}
