package agent

import (
	"fmt"
	"log/slog"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// logMaps logs how large each map is.
func logMaps(log *slog.Logger, dp *datapath.Datapath) error {
	sizes, err := dp.Maps().Sizes()
	if err != nil {
		return err
	}
	var total uint64
	var attrs []any
	for _, size := range sizes {
		attrs = append(attrs, slog.String(size.Name, fmt.Sprintf("%d entries, %d KiB", size.Entries, size.Bytes>>10)))
		total += size.Bytes
	}
	log.Info("maps", append(attrs, slog.String("all", fmt.Sprintf("%d MiB", total>>20)))...)

	return nil
}
