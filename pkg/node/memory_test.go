package node

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// The limit of a cgroup of either version counts, by what is left in it.
func TestMemoryOfCgroup(t *testing.T) {
	const mib = 1 << 20
	for _, test := range []struct {
		name  string
		files map[string]string
		want  Memory
		by    string
	}{
		{"a limit", map[string]string{"memory.max": "134217728\n", "memory.current": "104857600\n", "memory.stat": "anon 1\ninactive_file 20971520\n"},
			Memory{Free: 48 * mib, Limit: 128 * mib}, "memory.max"},
		{"no limit", map[string]string{"memory.max": "max\n", "memory.current": "1\n", "memory.stat": ""}, Memory{Free: 1024 * mib}, ""},
		{"a limit that is reached", map[string]string{"memory.max": "1048576\n", "memory.current": "2097152\n", "memory.stat": ""}, Memory{Limit: mib}, "memory.max"},
		{"more than the machine has", map[string]string{"memory.max": "10737418240\n", "memory.current": "0\n", "memory.stat": ""},
			Memory{Free: 1024 * mib, Limit: 10240 * mib}, "memory.max"},
		{"a limit of version 1", map[string]string{"memory.limit_in_bytes": "134217728\n", "memory.usage_in_bytes": "104857600\n", "memory.stat": "inactive_file 1\ntotal_inactive_file 20971520\n"},
			Memory{Free: 48 * mib, Limit: 128 * mib}, "memory.limit_in_bytes"},
		{"no limit of version 1", map[string]string{"memory.limit_in_bytes": "9223372036854771712\n"}, Memory{Free: 1024 * mib}, ""},
		{"nothing, as the root", nil, Memory{Free: 1024 * mib}, ""},
	} {
		t.Run("it has "+test.name, func(t *testing.T) {
			folder := t.TempDir()
			for name, text := range test.files {
				lab.Must(t, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
			}
			if test.by != "" {
				test.want.LimitedBy = filepath.Join(folder, test.by)
			}
			got := Memory{Free: 1024 * mib}
			lab.Must(t, got.limitBy(folder))
			if got != test.want {
				t.Errorf("it is %+v, want %+v", got, test.want)
			}
		})
	}
	if m, err := ReadMemory(); err != nil || m.Free == 0 {
		t.Errorf("of this process: %+v, %v", m, err)
	}
}
