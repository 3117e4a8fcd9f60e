package deploy

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-lb/sluice/test/lab"
)

// testRequests: no request of the agent was refused, and whatever the role
// grants was asked for.
func testRequests(t *testing.T, k *kubelet) {
	// An Event reports a field without meaning, and the same Event counts repetitions.
	for _, value := range []string{`"bad"`, "null", `"bad"`} {
		patch := `{"metadata":{"annotations":{"sluice-lb.io/algorithm":` + value + `}}}`
		_, err := k.client.CoreV1().Services("default").Patch(
			t.Context(), "web", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		lab.Must(t, err)
	}
	grants := make(map[request]bool)
	for _, rule := range k.role.Rules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					grants[request{verb, group, resource}] = true
				}
			}
		}
	}
	lab.EventuallyIn(t, waitTimeout, "the agent has asked for all that its role grants", func() error {
		asked := k.mustRequests(t)
		for grant := range grants {
			if len(asked[grant]) == 0 {
				return fmt.Errorf("never asked for: %v", grant)
			}
		}

		return nil
	})
	for is, codes := range k.mustRequests(t) {
		if !grants[is] {
			t.Errorf("the agent asks for %v, which the role does not grant: answered with %v", is, codes)
		}
		for code := range codes {
			if slices.Contains([]int{401, 403}, code) {
				t.Errorf("the agent may not ask for %v: %v", is, codes)
			}
		}
	}
}
