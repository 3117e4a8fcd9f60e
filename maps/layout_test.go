package maps

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
	gocmp "github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite testdata with the layout as it is")

// An agent adopts the maps that an earlier one pinned, if their folder is of its
// own Version. So the layout may not change while the Version stays.
func TestLayoutChangesWithVersion(t *testing.T) {
	golden := filepath.Join("testdata", "layout_"+Version+".txt")
	have := mustDescribeLayout(t)

	if *update {
		if err := os.WriteFile(golden, []byte(have), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatalf("%v\nIs Version new? Then run: go test ./maps -run Layout -update", err)
	}
	if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(have, "\n")); diff != "" {
		t.Errorf(`the layout of version %s has changed (-was +is):
%s
Maps that are pinned on a node have the old one. Raise maps.Version, unless no
release has had %[1]s yet, or all that is new is a number in an enum. Then run:
go test ./maps -run Layout -update`, Version, diff)
	}
}

// mustDescribeLayout lists the types and maps of the map ABI, byte for byte. How
// many entries a map has room for is not part of it, but for chunks.
func mustDescribeLayout(t *testing.T) string {
	t.Helper()

	abi, err := loadAbi()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, typ := range mustFindTypes(t, abi.Types) {
		describe(&text, typ)
	}
	for _, name := range slices.Sorted(maps.Keys(abi.Maps)) {
		if m := abi.Maps[name]; strings.HasPrefix(name, prefix) { // not .bss
			fmt.Fprintf(&text, "map %s: %s, flags %#x\n", name, m.Type, m.Flags)
			if inner := m.InnerMap; inner != nil {
				fmt.Fprintf(&text, "\t%s -> %s of %d, flags %#x\n", nameOf(m.Key), inner.Type, inner.MaxEntries, inner.Flags)
				m = inner
			}
			fmt.Fprintf(&text, "\t%s -> %s\n\n", nameOf(m.Key), nameOf(m.Value))
		}
	}

	return text.String()
}

// mustFindTypes returns the structs and enums that have a name, sorted by it.
func mustFindTypes(t *testing.T, spec *btf.Spec) []btf.Type {
	t.Helper()

	var found []btf.Type
	for typ, err := range spec.All() {
		if err != nil {
			t.Fatal(err)
		}
		switch typ.(type) {
		case *btf.Struct, *btf.Enum:
			// A chunk is no value, but how maps.h describes a map.
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
