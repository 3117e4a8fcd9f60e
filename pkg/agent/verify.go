package agent

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Compare returns a sentence for each difference between what is programmed and what is
// desired.
func Compare(desired, have []Frontend) []string {
	wanted := make(map[frontendKey]Frontend, len(desired))
	for _, f := range desired {
		wanted[f.key()] = f
	}
	var differences []string
	for _, h := range have {
		w, ok := wanted[h.key()]
		if !ok {
			differences = append(differences, fmt.Sprintf("%s: frontend %s is programmed, but no Service has it", h.Service, h.key()))

			continue
		}
		delete(wanted, h.key())
		if d := difference(w, h); d != "" {
			differences = append(differences, fmt.Sprintf("%s: frontend %s: %s", w.Service, w.key(), d))
		}
	}
	for key, w := range wanted {
		differences = append(differences, fmt.Sprintf("%s: frontend %s is not programmed", w.Service, key))
	}
	slices.Sort(differences)

	return differences
}

// difference names the first field in which two frontends differ.
func difference(want, have Frontend) string {
	w, h := reflect.ValueOf(want), reflect.ValueOf(have)
	for i := range w.NumField() {
		a, b := w.Field(i), h.Field(i)
		if a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0 {
			continue
		}
		if !reflect.DeepEqual(a.Interface(), b.Interface()) {
			name, _, _ := strings.Cut(w.Type().Field(i).Tag.Get("json"), ",")

			return fmt.Sprintf("%s is %v, should be %v", name, b, a)
		}
	}

	return ""
}
