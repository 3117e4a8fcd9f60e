package bpf

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/sluice-lb/sluice/test/lab"
)

// The kernel puts the unsharing of clones before a program that writes to packets by pointers, and so before all its runs.
func TestProgramsUnshareNoClones(t *testing.T) {
	lab.NeedsRoot(t)
	writer, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 76, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R1, 80, asm.Word), // data_end
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 1),
		asm.JGT.Reg(asm.R4, asm.R3, "end"),
		asm.StoreImm(asm.R2, 0, 0, asm.Byte),
		asm.Mov.Imm(asm.R0, verdictNext).WithSymbol("end"),
		asm.Return(),
	}})
	lab.Must(t, err)
	defer writer.Close()
	if !unshares(t, writer) {
		t.Fatal("the prologue of a program that writes is not recognized")
	}
	w := newWorld(t, ipv4)
	for _, p := range everyplace {
		for _, options := range [][]func(*DeviceConfig){nil, {func(c *DeviceConfig) { c.Heal, c.Resteer = true, true }}} {
			w.options = options
			programs := w.programs(t, p)
			for name, program := range map[string]*ebpf.Program{"ingress": programs.Ingress, "egress": programs.Egress} {
				if unshares(t, program) {
					t.Errorf("%s at %s begins by unsharing clones", name, p)
				}
			}
		}
	}
}

// unshares reports whether a program begins with a byte of the packet's own (its flag "cloned"), and a call.
func unshares(t *testing.T, program *ebpf.Program) bool {
	t.Helper()
	const prologue = 8 // instructions
	info, err := program.Info()
	lab.Must(t, err)
	instructions, err := info.Instructions()
	lab.Must(t, err)
	calls := false
	for _, in := range instructions[:min(prologue, len(instructions))] {
		calls = calls || in.OpCode.JumpOp() == asm.Call
	}
	first := instructions[0]

	return first.OpCode.Class() == asm.LdXClass && first.OpCode.Size() == asm.Byte && first.Src == asm.R1 && calls
}
