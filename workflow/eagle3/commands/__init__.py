"""What people run beside a build: plan, status, trace, doctor, push."""
