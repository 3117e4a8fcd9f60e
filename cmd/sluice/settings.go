package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/sluice-lb/sluice/pkg/config"
)

// settings are kube-proxy's configuration in its effect, from the file or from
// flags, and what there is to say of it.
type settings struct {
	kubeProxy *config.KubeProxy
	file      *config.File // nil: there is none
	// unknown names what the file has and kube-proxy does not know.
	unknown error
	// ignored are flags that are set and do not count beside a file.
	ignored []string
	// unused are fields and flags that are set and mean nothing to Sluice.
	unused []string
}

// settle returns the settings, complete and valid. Which flags count beside a
// file is kube-proxy's rule. The caller closes them.
func (f *kubeProxyFlags) settle() (*settings, error) {
	s := &settings{kubeProxy: f.cfg}
	var err error
	if f.file != "" {
		err = s.read(f)
	} else {
		f.fillIn()
	}
	if err == nil {
		err = f.setHostname(s.kubeProxy)
	}
	if err == nil {
		config.Complete(s.kubeProxy)
		err = config.Validate(s.kubeProxy)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.unused = config.Unused(s.kubeProxy)
	if f.file == "" && !f.set.Changed("ipvs-min-sync-period") { // its default is another than the file's
		s.unused = slices.DeleteFunc(s.unused, func(name string) bool { return name == "ipvs.minSyncPeriod" })
	}
	for _, name := range []string{"boot-id-file", "machine-id-file"} { // they are no fields
		if f.file == "" && f.set.Changed(name) {
			s.unused = append(s.unused, "--"+name)
		}
	}

	return s, nil
}

func (s *settings) close() error {
	if s.file == nil {
		return nil
	}

	return s.file.Close()
}

// read takes the file instead of the flags, but for those of logging.
func (s *settings) read(f *kubeProxyFlags) error {
	var err error
	if s.file, err = config.Open(f.file); err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	if s.kubeProxy, s.unknown, err = s.file.Decode(); err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	f.set.VisitAll(func(flag *pflag.Flag) {
		counts := slices.Contains(countWithFile, flag.Name) || isLogging(flag.Name)
		if flag.Changed && !counts && slices.Contains(f.names, flag.Name) {
			s.ignored = append(s.ignored, "--"+flag.Name)
		}
	})

	return f.copyLogging(&s.kubeProxy.Logging)
}

// fillIn does what flags cannot that are fields: they depend on each other.
func (f *kubeProxyFlags) fillIn() {
	cfg := f.cfg
	if f.writeTo == "" {
		cfg.HealthzBindAddress = config.WithPort(cfg.HealthzBindAddress, int(f.healthzPort))
		cfg.MetricsBindAddress = config.WithPort(cfg.MetricsBindAddress, int(f.metricsPort))
		if f.healthzPort == 0 {
			cfg.HealthzBindAddress = ""
		}
		if f.metricsPort == 0 {
			cfg.MetricsBindAddress = "" // refused: metrics cannot be off
		}
	}
	config.SetMasqueradeAll(cfg, f.masqueradeAll)
	if cfg.Mode == config.ModeIPVS {
		config.SetPeriods(cfg, f.ipvsSync, f.ipvsMin)
	} else {
		config.SetPeriods(cfg, f.iptablesSync, f.iptablesMin)
	}
	if !f.set.Changed("proxy-mode") && len(cfg.NodePortAddresses) == 0 {
		cfg.NodePortAddresses = []string{config.Primary}
	}
}

// copyLogging lets the logging flags that are set count more than the file.
func (f *kubeProxyFlags) copyLogging(to *logsapi.LoggingConfiguration) error {
	var flags pflag.FlagSet
	written := *to
	logsapi.AddFlags(to, &flags)
	*to = written // which AddFlags has set to defaults in part
	vmodule := to.VModule
	to.VModule = nil
	var errs []error
	flags.VisitAll(func(flag *pflag.Flag) {
		if given := f.set.Lookup(flag.Name); given != nil && given.Changed {
			errs = append(errs, flag.Value.Set(given.Value.String()))
		}
	})
	to.VModule = append(to.VModule, vmodule...) // the first that matches counts

	return errors.Join(errs...)
}

// setHostname lets --hostname-override count more than the file. Blanks go, and
// upper case.
func (f *kubeProxyFlags) setHostname(cfg *config.KubeProxy) error {
	if f.hostnameOverride == "" {
		return nil
	}
	if cfg.HostnameOverride = normalName(f.hostnameOverride); cfg.HostnameOverride == "" {
		return fmt.Errorf("--hostname-override %q: it is blank", f.hostnameOverride)
	}

	return nil
}

// nodeName is the name of this node's Node object.
func (s *settings) nodeName() (string, error) {
	if given := s.kubeProxy.HostnameOverride; given != "" {
		if name := normalName(given); name != "" {
			return name, nil
		}

		return "", fmt.Errorf("hostnameOverride %q: it is blank", given)
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("host name: %w", err)
	}
	name := normalName(host)
	if name == "" {
		return "", fmt.Errorf("host name %q: it is blank", host)
	}

	return name, nil
}

func normalName(name string) string { return strings.ToLower(strings.TrimSpace(name)) }

// tell logs, once and in a line each, what is accepted and does nothing.
func (s *settings) tell(log *slog.Logger) {
	if s.unknown != nil {
		log.Warn("the configuration file has what kube-proxy does not know; it is left out", "unknown", s.unknown)
	}
	if len(s.ignored) > 0 {
		log.Warn("flags do not count beside a configuration file", "flags", s.ignored)
	}
	if len(s.unused) > 0 {
		log.Info("settings that mean nothing to Sluice", "fields", s.unused)
	}
}

// write is --write-config-to.
func (s *settings) write(path string) error {
	text, err := config.Encode(s.kubeProxy)
	if err == nil {
		err = os.WriteFile(path, text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}

	return nil
}
