package bpf

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-lb/sluice/test/lab"
)

// What Linux 5.10 admits for the stacks of a chain of calls, and the unit in which it counts that of a function. Newer
// kernels count in smaller units, and load what this one refuses.
const (
	maxStack  = 512
	stackUnit = 32
)

// TestStacks guards what no kernel but the oldest refuses.
func TestStacks(t *testing.T) {
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){
		"sock": loadSock, "device": loadDevice, "trace": loadTrace, "syn": loadSyn, "iter": loadIter, "probe": loadProbe,
	} {
		spec, err := load()
		lab.Must(t, err)
		for _, program := range spec.Programs {
			functions := functionsOf(program.Instructions)
			chain := deepest(functions, btf.FuncMetadata(&program.Instructions[0]).Name)
			t.Logf("%s: %d bytes", program.Name, chain.stack)
			if chain.stack > maxStack {
				t.Errorf("%s: the stacks of %s take %d bytes, Linux 5.10 admits %d", name, strings.Join(chain.functions, ", "), chain.stack, maxStack)
			}
		}
	}
}

// Before Linux 6.8, the verifier walks each global function of a program, called or not, and a hook of one family has no
// addresses of the other.
func TestFunctionsOfOneFamily(t *testing.T) {
	spec, err := loadSock()
	lab.Must(t, err)
	for _, program := range spec.Programs {
		family := "_v" + program.Name[len(program.Name)-1:]
		for i := range program.Instructions {
			f := btf.FuncMetadata(&program.Instructions[i])
			if f == nil || !strings.Contains(f.Name, "_v") || strings.HasSuffix(f.Name, family) {
				continue
			}
			if params := f.Type.(*btf.FuncProto).Params; len(params) > 0 && isHookContext(params[0].Type) {
				t.Errorf("%s has the function %s", program.Name, f.Name)
			}
		}
	}
}

// isHookContext reports whether a type is what a hook of connect or sendmsg is called with.
func isHookContext(of btf.Type) bool {
	pointer, ok := btf.As[*btf.Pointer](of)
	if !ok {
		return false
	}
	to, ok := btf.As[*btf.Struct](pointer.Target)

	return ok && to.Name == "bpf_sock_addr"
}

// function is a function of a program: the size of its stack, and which others it calls.
type function struct {
	stack int
	calls []string
}

// functionsOf takes a program apart. A stack is as large as the deepest place that an instruction reads, writes or
// takes the address of, by the frame pointer or a register that is derived from it.
func functionsOf(program asm.Instructions) map[string]*function {
	functions := make(map[string]*function)
	var at *function
	places := make(map[asm.Register]int) // registers that point into the stack, and where
	for i := range program {
		ins := &program[i]
		if f := btf.FuncMetadata(ins); f != nil {
			at = &function{}
			functions[f.Name] = at
			clear(places)
			places[asm.R10] = 0
		}
		deep := func(place int) { at.stack = max(at.stack, -place) }
		source, fromStack := places[ins.Src]
		target, toStack := places[ins.Dst]
		op := ins.OpCode
		switch class := op.Class(); {
		case ins.IsFunctionReference():
			at.calls = append(at.calls, ins.Reference())
		case class.IsStore() && toStack:
			deep(target + int(ins.Offset))
		case class.IsLoad():
			if fromStack && op.Mode() == asm.MemMode {
				deep(source + int(ins.Offset))
			}
			delete(places, ins.Dst)
		case class.IsALU() && op.ALUOp() == asm.Mov && op.Source() == asm.RegSource && fromStack:
			places[ins.Dst] = source
		case class.IsALU() && op.ALUOp() == asm.Add && op.Source() == asm.ImmSource && toStack:
			places[ins.Dst] = target + int(ins.Constant)
			deep(places[ins.Dst])
		case class.IsALU():
			delete(places, ins.Dst)
		}
	}

	return functions
}

// chain is a function, one that it calls, and so on.
type chain struct {
	functions []string
	stack     int
}

// deepest returns the chain of calls from a function on that needs the most room.
func deepest(functions map[string]*function, name string) chain {
	f := functions[name]
	var below chain
	for _, callee := range f.calls {
		if c := deepest(functions, callee); c.stack > below.stack {
			below = c
		}
	}
	own := (max(f.stack, 1) + stackUnit - 1) / stackUnit * stackUnit

	return chain{append([]string{name}, below.functions...), own + below.stack}
}
