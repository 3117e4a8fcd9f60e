package main

import (
	"context"
	"fmt"
	"os/exec"
	"strings"

	"github.com/sluice-lb/sluice/maps"
)

func playVerbs(ctx context.Context, s *stage) error {
	for _, verb := range []string{"services", "backends", "verify"} {
		if err := ctx.Err(); err != nil {
			return err
		}
		printed, err := s.agent.Run(verb)
		if err != nil {
			return err
		}
		s.out.command("sluice %s", verb)
		s.out.printed(printed)
	}

	return s.showMap(maps.ChunkPinOf(s.agent.BPFRoot(), maps.NameFrontends, 0))
}

// showMap shows an entry of a map, if there is a program to show it.
func (s *stage) showMap(pin string) error {
	s.out.command("bpftool map dump pinned %s", pin)
	bpftool, err := exec.LookPath("bpftool")
	if err != nil {
		s.out.printed("(bpftool is not installed; any map can be read with it, while the agent runs or not)")
		return nil
	}
	dump, err := exec.Command(bpftool, "map", "dump", "pinned", pin).CombinedOutput()
	if err != nil {
		return fmt.Errorf("bpftool map dump: %w: %s", err, dump)
	}
	s.out.printed(entryOf(string(dump), webBytes, `"kind": 1`))

	return nil
}

// entryOf cuts the entry that contains all these strings out of a dump, from its value
// on, or else the first one.
func entryOf(dump string, parts ...string) string {
	entries := strings.Split(dump, "},{\n")
	for _, entry := range entries {
		found := true
		for _, part := range parts {
			found = found && strings.Contains(entry, part)
		}
		if _, value, cut := strings.Cut(entry, `"value"`); found && cut {
			return "… the entry of " + webIPv4 + ":\n        \"value\"" + value + "…\n"
		}
	}

	return entries[0] + "…\n"
}
