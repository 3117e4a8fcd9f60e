package e2e

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
)

// ports are those of most Services: 80 for TCP and UDP.
func ports() []corev1.ServicePort {
	return []corev1.ServicePort{
		{Name: "tcp", Port: 80, Protocol: corev1.ProtocolTCP},
		{Name: "udp", Port: 80, Protocol: corev1.ProtocolUDP},
	}
}

// createService creates a Service with both families and both ports, unless
// the options set others.
func (a *api) createService(t testing.TB, name string, options ...func(*corev1.ServiceSpec)) *corev1.Service {
	t.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack),
			Ports:          ports(),
		},
	}
	for _, option := range options {
		option(&svc.Spec)
	}
	svc, err := a.client.CoreV1().Services(a.namespace).Create(t.Context(), svc, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	return svc
}

// changeService changes a Service, and returns what the API server made of it.
func (a *api) changeService(t testing.TB, name string, change func(*corev1.Service)) *corev1.Service {
	t.Helper()
	services := a.client.CoreV1().Services(a.namespace)
	var svc *corev1.Service
	err := retry.RetryOnConflict(retry.DefaultRetry, func() (err error) {
		if svc, err = services.Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		change(svc)
		svc, err = services.Update(t.Context(), svc, metav1.UpdateOptions{})

		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	return svc
}

// setLoadBalancer is what a cloud controller writes.
func (a *api) setLoadBalancer(t testing.TB, name string, ingress ...corev1.LoadBalancerIngress) {
	t.Helper()
	services := a.client.CoreV1().Services(a.namespace)
	svc, err := services.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	svc.Status.LoadBalancer.Ingress = ingress
	if _, err := services.UpdateStatus(t.Context(), svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (a *api) deleteService(t testing.TB, name string) {
	t.Helper()
	if err := a.client.CoreV1().Services(a.namespace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}
